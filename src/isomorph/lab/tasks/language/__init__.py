"""Language: pre-training on masked words, and fine-tuning on sentences and sentence pairs (GLUE)."""
