"""Detection and instance segmentation: COCO's format, joint augmentation, Mask R-CNN's losses, AP, pages."""
