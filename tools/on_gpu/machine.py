"""What this is: the versions of all that takes part, and the GPU."""

from __future__ import annotations

import os
import platform

import torch

import schedir
from on_gpu.rank import arguments, begin, say


def main() -> None:
    args = arguments(__doc__).parse_args()
    begin(args.device)
    found = [f"schedir {schedir.__version__}", f"Python {platform.python_version()}"]
    found += [f"torch {torch.__version__}", f"{os.cpu_count()} cores"]
    if args.device != "cpu":
        properties = torch.cuda.get_device_properties(args.device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}", properties.name]
        found += [f"{properties.multi_processor_count} multiprocessors"]
        found += [f"{properties.total_memory / 2**30:.0f} GiB"]
        torch.ones(8, 8, device=args.device) @ torch.ones(8, 8, device=args.device)
        torch.cuda.synchronize()
    say(", ".join(found))


if __name__ == "__main__":
    main()
