"""Denoising diffusion: training, sampling, and the distance of generated images from real ones."""

from isomorph.lab.tasks.diffusion.image_distance import image_distances
from isomorph.lab.tasks.diffusion.sampling import NoiseSchedule, sample

__all__ = ["NoiseSchedule", "image_distances", "sample"]
