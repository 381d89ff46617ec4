"""Runs instructions: those of one rank, or of several ranks in one process, which take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.call import Call
from schedir.runtime.processes.failure import WaitError, describe
from schedir.runtime.program.instruction import Instruction


def advance(instructions: Sequence[Instruction], call: Call) -> None:
    """Run a rank's instructions, or as many as are given.

    Raises ExecutionError, or WaitError for what never comes, with the place of the instruction.
    """
    instruction = None
    try:
        for instruction in instructions:
            if instruction.receives:
                instruction.wait()
            instruction.run(call)
    except WaitError as stalled:
        if instruction is not None:
            stalled.at(instruction.rank, instruction.listed_at, instruction.action)
        raise
    except Exception as error:
        if instruction is None:
            raise
        raise _placed(error, instruction) from None


def _placed(error: Exception, instruction: Instruction) -> ExecutionError:
    """What has failed an instruction, with its place."""
    # With the traceback of the cause, which leads to the user's line, and that one alone.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return ExecutionError(
        str(error) if isinstance(error, ExecutionError) else describe(error),
        rank=instruction.rank,
        index=instruction.listed_at,
        action=instruction.action,
        cause=error,
    ).with_traceback(inner)


def _is_blocked(instruction: Instruction, call: Call) -> bool:
    """Whether it has to wait; what ranks do together is done by the one that asks last.

    Raises ExecutionError for what that fails with.
    """
    try:
        return instruction.is_blocked(call)
    except Exception as error:
        raise _placed(error, instruction) from None


def take_turns(
    lists: Sequence[Sequence[Instruction]],
    call: Call,
    accelerator: Accelerator,
    streams: Sequence[Any],
) -> None:
    """Run the ranks of this process in turn, each as far as it gets until it is blocked.

    Each has a stream of its own, of `streams`, where the device has any.
    """
    reached = [0] * len(lists)
    begun = accelerator.mark()
    for stream in streams:
        with accelerator.on(stream):
            begun.wait()
    progress = True
    try:
        while progress:
            progress = False
            for turn, instructions in enumerate(lists):
                first = reached[turn]
                with accelerator.on(streams[turn]):
                    while reached[turn] < len(instructions):
                        instruction = instructions[reached[turn]]
                        if _is_blocked(instruction, call):
                            break
                        advance((instruction,), call)
                        reached[turn] += 1
                progress |= reached[turn] > first
    finally:
        # After an error too: what was computed is given up, and its memory given out again.
        for stream in streams:
            with accelerator.on(stream):
                ended = accelerator.mark()
            ended.wait()
    for at, instructions in zip(reached, lists, strict=True):
        if at < len(instructions):
            raise ExecutionError(
                "what it waits for never comes",
                rank=instructions[at].rank,
                index=instructions[at].listed_at,
                action=instructions[at].action,
            )
