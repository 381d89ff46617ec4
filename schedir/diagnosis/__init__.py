"""Name the root of a hang: the ranks that wait for nobody while others wait for them.

The dumps of torch's flight recorder are those of any job that uses torch.distributed:

    found = schedir.diagnosis.blame.blame(schedir.diagnosis.flight_recorder.read_dumps("dumps"))
    [root.rank for root in found.roots]
"""
