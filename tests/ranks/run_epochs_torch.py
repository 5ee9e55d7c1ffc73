"""As `run_epochs`, on ranks of torchrun."""

import runpy
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
runpy.run_path(str(Path(__file__).with_name("run_epochs.py")), run_name="run_epochs")
dist.destroy_process_group()
