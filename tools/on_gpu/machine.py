"""What this is: the versions of all that takes part, and the GPU."""

from __future__ import annotations

import platform

import torch

import schedir


def main() -> None:
    found = [f"schedir {schedir.__version__}", f"Python {platform.python_version()}"]
    found.append(f"torch {torch.__version__}")
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found += [f"NCCL {nccl}", torch.cuda.get_device_name(0)]
    print(", ".join(found))


if __name__ == "__main__":
    main()
