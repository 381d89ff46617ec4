"""When sends are known to have arrived, without waiting for them.

A send has arrived when something comes back that its receiver sent after it had used it; then the
tensor that it holds can go.

    rank 0   SEND_ACT0 ──▶ … RECV_GRAD0  B0       by B0 its SEND_ACT0 has arrived: rank 1 has sent
    rank 1   RECV_ACT0  F0  B0  SEND_GRAD0        SEND_GRAD0 after the F0 that used it
"""

from __future__ import annotations

import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import Schedule


def arrivals(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """For each compute action of the rank that consumes a receive, the sends that have arrived by
    then: as indices into the rank's list."""
    transfers, start = graph_of(schedule).transfers, int(schedule.columns.starts[rank])
    found: dict[int, list[int]] = {}
    sent = np.flatnonzero((transfers.source == rank) & transfers.matched)
    for peer in sorted({*transfers.target[sent].tolist()}):
        to = sent[transfers.target[sent] == peer]
        answers = (transfers.source == peer) & (transfers.target == rank)
        back = np.flatnonzero(answers & transfers.matched)
        back = back[np.argsort(transfers.send[back])]
        # The first that the peer sends after the compute that has used what it was sent.
        first = np.searchsorted(transfers.send[back], transfers.user[to])
        for send, answer in zip(transfers.send[to].tolist(), first.tolist(), strict=True):
            if answer < len(back):
                # Of all answers from there on, the one that this rank looks at first.
                user = int(transfers.user[back[answer:]].min())
                found.setdefault(user - start, []).append(send - start)
    return found
