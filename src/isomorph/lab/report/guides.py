"""How to read each section of a page: what its charts show, and what its terms mean."""

DOTS = "A dot is a head; the line joins the means of the layers."
PREDICTIONS = (
    "The most likely classes of each image, with the probability that the model gives to each."
)
MAPS = (
    "Each small map is one attention head: bright patches are those that the framed patch attends to. A caption with a "
    "gate is a head of gated positional attention: it attends by position at gate 1, by content at gate 0."
)
DIFFERENCE = "In the difference, red is more attention in the second model, blue less, grey no visible difference."
GATES = (
    "Gated positional attention mixes two kinds of attention: the share sigma(gate) attends by position, the rest by "
    f"content. The span is the width of the positional part; a convolution has gate 1 and span 0. {DOTS}"
)
GAMMAS = (
    "An inserted block adds gamma * block(x) to x. A dot is the gamma of a channel: 0 before training, and larger, of "
    "either sign, the more training uses the block; the line joins the means of the layers."
)
DISTANCE = (
    "Nonlocality is the mean distance between a patch and what it attends to; attention to the class token and to "
    "registers, drawn apart, counts as distance 0. Entropy is 0 if a patch attends to one patch only, and largest if "
    f"it attends to all equally. Largest logits are means over images; very large ones make training unstable. {DOTS}"
)
BRANCHES = (
    "A dot is the similarity of two branches of a pyramid: near 1, they compute the same up to rotation and scale "
    f"(TDRL Fig. 2c). {DOTS}"
)
CKA = (
    "CKA compares the features of two layers: 1 is equal up to rotation and scale, near 0 unrelated; values slightly "
    "below 0 occur by chance. It is the linear, unbiased CKA of features averaged over the image."
)
EVOLUTION = (
    "F_k = CKA(f_k, f_out) / CKA(f_in, f_out) of the output of layer k: 1 at the first layer, higher where features "
    "are closer to the last ones (Refiner eq. 2)."
)
ROBUSTNESS = (
    "A cell is one corruption at one severity, from 1 (weak) to 5 (strong). In the difference of two models, red is "
    "gained by the second, blue lost."
)
COST = "1 MAC = 2 FLOPs, attention included. Saved: activations stored for the backward pass."
PASS_COST = (
    "Per image: MACs that every image adds; per pass: MACs of a forward pass whatever its batch (products of weights). "
    "Branch by branch: the cost of an image in training if its tokens passed through all branches of a pyramid."
)
HISTORY = "The base model, then every edit in order, then the recipe that trained the model, if it is known."
RESULTS = (
    "NLL is the mean negative log-likelihood of the test labels: lower is better. Values other than the best top-1 are "
    "those of the last evaluation."
)
ACCURACY_COST = (
    "Best top-1 of a run, or the result of isomorph evaluate, against the cost of one image (1 MAC = 2 FLOPs, "
    "attention included). Up and to the left is better; compare only models of the same test set."
)
CURVES = (
    "One line for each run. Lower is better for loss and NLL, higher for top-1. Training loss may include label "
    "smoothing and mixed images, so that it need not fall below the loss on the test set."
)
RANGE = "A line is the mean over a layer's heads, the band their range; layers run from light (first) to dark (last)."
CENTRES = (
    "A gate of 1 attends by position only, 0 by content only; the span is the width of attention by position, and the "
    "centre the position where it is strongest, relative to the patch itself (the cross)."
)
RECIPES = "Fields of the recipes that differ, as JSON; all other fields are equal."
