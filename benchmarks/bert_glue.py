"""A narrow BERT, plain and with refined attention: pre-trained on GLUE's sentences, then fine-tuned on its tasks.

    python benchmarks/bert_glue.py [--seeds 0 1 2] [--datasets sst2 cola rte] [--out runs/bert_glue]
        [--pretraining epochs=3] [--fine-tuning epochs=3] [--rates 3e-4 1e-3] [--arms plain refined]

Both networks take equal numbers of steps, from the same initial weights and in the same order. "plain, equal time"
takes as many more of them, in pre-training and fine-tuning, as fit into the time of the refined network, by the images
per second of both runs. With several rates, the one of each network and data set is chosen with the first seed on a
tenth of the training data, which is left out then. Runs resume, so the script may be stopped at any time. Results are
in benchmarks/results/bert_glue.json.
"""

import argparse
import json
import statistics
from pathlib import Path

import isomorph as iso
from interleave import show, spread, update
from isomorph.tasks.language.glue import GLUE
from run_logs import read_log, speed

EQUAL_TIME = "plain, equal time"
ARMS = ("plain", "refined", EQUAL_TIME)


def train(name, out, overrides):
    """The last metrics of a run with its steps, and their seconds at its usual speed; a complete run is only read."""
    recipe = iso.load_recipe(name, [*overrides, f"out={out}"])
    if not is_complete(out, recipe):
        iso.train(recipe, show=False)
    steps = read_log(out, "steps")[-1]["step"]
    seconds = round(steps * recipe.data.batch_size / speed(out))
    return {**read_log(out, "log")[-1], "steps": steps, "seconds": seconds}


def is_complete(out, recipe):
    """True for a complete run of this recipe."""
    said = out / "recipe.json"
    same = said.is_file() and json.loads(said.read_text()) == recipe.model_dump(mode="json")
    return same and (out / "model.safetensors").is_file()


def as_long_as(plain, refined):
    """The overrides with which the plain network trains for as long as the refined one, and not for fewer steps.

    Both are folders of runs.
    """
    recipe = json.loads((plain / "recipe.json").read_text())
    iterations = round(read_log(plain, "steps")[-1]["step"] * max(1, speed(plain) / speed(refined)))
    warmup = max(1, round(iterations * recipe["optim"]["warmup_epochs"] / recipe["epochs"]))
    return [f"iterations={iterations}", "optim.warmup_epochs=0", f"optim.warmup_iterations={warmup}"]


class Comparison:
    """The runs of all networks, seeds and data sets, in one folder."""

    def __init__(self, arguments):
        self.given, self.out = arguments, Path(arguments.out)
        self.rates, self.fine_tuned = {}, {}

    def pretrained(self, arm, seed):
        """The folder of a pre-training."""
        return self.out / f"pre_{arm.replace(', ', '_').replace(' ', '_')}_{seed}"

    def pretrain(self, arm, seed):
        """A row: loss and accuracy on masked words."""
        overrides = [f"seed={seed}", *self.given.pretraining]
        if arm == EQUAL_TIME:
            overrides += as_long_as(self.pretrained("plain", seed), self.pretrained("refined", seed))
        name = "bert_narrow_refined" if arm == "refined" else "bert_narrow"
        found = train(name, self.pretrained(arm, seed), overrides)
        scores = dict(loss=round(found["masked_loss"], 4), accuracy=round(found["masked_accuracy"], 2))
        return dict(network=arm, seed=seed, steps=found["steps"], **scores, seconds=found["seconds"])

    def fine_tune(self, dataset, arm, seed, rate, split=None):
        """The metrics of a data set on its development set, or on a part of the training data."""
        out = self.out / (
            f"{dataset}_{arm.replace(', ', '_').replace(' ', '_')}_{seed}_{rate:g}" + "_split" * bool(split)
        )
        overrides = [f"seed={seed}", f"model.weights={self.pretrained(arm, seed) / 'model.safetensors'}"]
        overrides += [f"optim.lr={rate}", *self.given.fine_tuning]
        overrides += ["data.fraction=0.2"] if dataset == "sst2" else []
        overrides += [f"data.split={split}"] if split else []
        if arm == EQUAL_TIME:
            overrides += as_long_as(*(self.fine_tuned[dataset, each, seed] for each in ("plain", "refined")))
        elif not split:
            self.fine_tuned[dataset, arm, seed] = out
        return train(f"glue_{dataset}_narrow" + "_refined" * (arm == "refined"), out, overrides)

    def rate(self, dataset, arm, seed):
        """The rate with the best metric on a tenth of the training data; of the plain network in both times."""
        arm = "plain" if arm == EQUAL_TIME else arm
        if (dataset, arm) not in self.rates:
            tried = self.given.rates
            if len(tried) > 1:
                metric = GLUE[dataset].metrics[0]
                tried = sorted(tried, key=lambda rate: -self.fine_tune(dataset, arm, seed, rate, split=0.1)[metric])
            self.rates[dataset, arm] = tried[0]
        return self.rates[dataset, arm]

    def score(self, dataset, arm, seed):
        """A row: the first metric of a data set."""
        rate, metric = self.rate(dataset, arm, seed), GLUE[dataset].metrics[0]
        found = self.fine_tune(dataset, arm, seed, rate)
        row = dict(dataset=dataset, network=arm, seed=seed, rate=rate, steps=found["steps"], metric=metric)
        return row | dict(value=round(found[metric], 2), seconds=found["seconds"])


def compare(arguments):
    """The rows of pre-training and fine-tuning, written whenever one is done; the equal times come last."""
    comparison, pretraining, fine_tuning = Comparison(arguments), [], []
    last = [EQUAL_TIME] if EQUAL_TIME in arguments.arms else []
    for arms in filter(None, ([arm for arm in arguments.arms if arm not in last], last)):
        for seed in arguments.seeds:
            for arm in arms:
                pretraining.append(comparison.pretrain(arm, seed))
                update("bert_glue", {"pretraining": pretraining})
            for dataset in arguments.datasets:
                for arm in arms:
                    fine_tuning.append(comparison.score(dataset, arm, seed))
                    update("bert_glue", {"fine_tuning": fine_tuning})
    return pretraining, fine_tuning


def summarise(fine_tuning):
    """Rows of each data set and network: mean and spread over seeds."""
    groups = {}
    for row in fine_tuning:
        groups.setdefault((row["dataset"], row["network"]), []).append(row)
    rows = []
    for (dataset, network), found in sorted(groups.items(), key=lambda each: each[0][0]):
        values = [row["value"] for row in found]
        about = dict(metric=found[0]["metric"], seeds=len(found), rate=found[0]["rate"], steps=found[0]["steps"])
        value = spread(values) if len(values) > 1 else f"{values[0]:.2f}"
        seconds = round(statistics.mean(row["seconds"] for row in found))
        rows.append(dict(dataset=dataset, network=network) | about | dict(value=value, seconds=seconds))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--datasets", nargs="+", default=["sst2", "cola", "rte"], choices=sorted(GLUE))
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-4, 1e-3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--pretraining", nargs="*", default=[])
    parser.add_argument("--fine-tuning", nargs="*", default=[])
    parser.add_argument("--out", default="runs/bert_glue")
    arguments = parser.parse_args()
    pretraining, fine_tuning = compare(arguments)
    tables = {"pre-training": pretraining, "fine-tuning": summarise(fine_tuning)}
    for title, rows in tables.items():
        show(title, rows)


if __name__ == "__main__":
    main()
