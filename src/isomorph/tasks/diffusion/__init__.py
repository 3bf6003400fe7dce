"""Denoising diffusion: training, sampling, and the distance of generated images from real ones."""

from isomorph.tasks.diffusion.noise_schedule import NoiseSchedule

__all__ = ["NoiseSchedule"]
