"""Where batches of communication start and end: two exchanges for each, which nobody posts.

    the queues before  ←  start  ←  transfers of the batch  ←  end  ←  the queues after, compute
                                                                       that consumes a part

The start waits until the channels of all parts are free, the end until all parts have arrived.
"""

from __future__ import annotations

import numpy as np

from schedir.ir.columns import Columns, Ints
from schedir.ir.dataflow import Transfers


def points_of_batches(
    columns: Columns, transfers: Transfers, batches: Ints, before: Ints, exchanges: int
) -> tuple[dict[int, list[int]], Ints]:
    """What each exchange waits for, by its number, and by entry the end of its batch, -1 for none.

    The points of the `batches`, given as entries, are numbered on from `exchanges`: all starts,
    then all ends. `before` is, by transfer, the one before it on its channel, -1 for none.
    """
    start_of = np.full(int(columns.entry[-1]) + 1, -1)
    start_of[batches] = exchanges + np.arange(len(batches))
    end_of = np.where(start_of < 0, -1, start_of + len(batches))
    sent, received = columns.entry[transfers.send], columns.entry[transfers.receive]

    waits: dict[int, list[int]] = {
        point: [] for point in range(exchanges, exchanges + 2 * len(batches))
    }
    for transfer in np.flatnonzero(before >= 0).tolist():
        waits[transfer] = [int(before[transfer])]
    for entries in (sent, received):
        queued, starts = _queued_behind(transfers, entries, end_of), start_of[entries]
        for transfer in np.flatnonzero(starts >= 0).tolist():
            waits[int(end_of[entries[transfer]])].append(transfer)
            if queued[transfer] >= 0:
                waits[int(starts[transfer])].append(int(queued[transfer]))
        point = np.where(starts < 0, queued, starts)
        for transfer in np.flatnonzero(point >= exchanges).tolist():
            waits.setdefault(transfer, []).append(int(point[transfer]))
    return waits, end_of


def _queued_behind(transfers: Transfers, entries: Ints, end_of: Ints) -> Ints:
    """For each transfer, the exchange before it in the queue of one of its ends, -1 for none.

    `entries` are those of that end; `end_of` the exchange that ends each entry, -1 for no batch.
    """
    order, follows = transfers.by_channel
    own = entries[order]
    turns = np.arange(len(order))
    # Parts of one batch don't wait for each other: for what is queued before the first of them.
    goes_on = follows.copy()
    goes_on[1:] &= own[1:] == own[:-1]
    first = np.maximum.accumulate(np.where(goes_on, 0, turns))
    last = np.where(follows[first], first - 1, -1)
    end = end_of[own[last]]
    found = np.full(len(transfers), -1)
    found[order] = np.where(last < 0, -1, np.where(end < 0, order[last], end))
    return found
