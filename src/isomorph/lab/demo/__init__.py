"""The demo: a trained CNN becomes attention with the same function, and a ViT starts as a convolution."""

from isomorph.lab.demo.page import write_demo_page
from isomorph.lab.demo.run import Demo, next_commands, run_demo

__all__ = ["Demo", "next_commands", "run_demo", "write_demo_page"]
