"""A narrow BERT, plain and with refined attention: pre-trained on GLUE's sentences, then fine-tuned on its tasks.

    python benchmarks/bert_glue.py [--seeds 0 1 2] [--datasets sst2 cola rte] [--out runs/bert_glue]
        [--pretraining epochs=3] [--fine-tuning epochs=3] [--rates 3e-4 1e-3]

Both networks take equal numbers of steps, from the same initial weights and in the same order. With several rates, the
one of each network and data set is chosen with the first seed on a tenth of the training data, which is left out then.
Runs resume, so the script may be stopped at any time. Results are in benchmarks/results/bert_glue.json.
"""

import argparse
import json
from pathlib import Path

import isomorph as iso
from interleave import show, spread, update
from isomorph.tasks.language.glue import GLUE

ARMS = {"plain": "", "refined": "_refined"}


def train(name, out, overrides):
    """The metrics of a recipe's run and its seconds, from its folder if it is complete."""
    recipe = iso.load_recipe(name, [*overrides, f"out={out}"])
    metrics = iso.train(recipe, show=False).metrics
    lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return {**metrics, "seconds": sum(line["seconds"] for line in lines), "epochs": recipe.epochs}


def pretrain(out, seed, overrides):
    """A row for each network: loss and accuracy on masked words."""
    rows = []
    for arm, ending in ARMS.items():
        found = train(f"bert_narrow{ending}", out / f"pre_{arm}_{seed}", [f"seed={seed}", *overrides])
        row = dict(seed=seed, network=arm, epochs=found["epochs"], loss=found["masked_loss"])
        rows.append(row | dict(accuracy=found["masked_accuracy"], seconds=found["seconds"]))
    return rows


def fine_tune(out, dataset, arm, seed, rate, overrides, split=None):
    """The first metric of a data set on its development set, or on a part of the training data."""
    weights = f"model.weights={out / f'pre_{arm}_{seed}' / 'model.safetensors'}"
    ending = f"{dataset}_{arm}_{seed}_{rate:g}" + ("_split" if split else "")
    fields = [f"seed={seed}", weights, f"optim.lr={rate}", *overrides] + [f"data.split={split}"] * bool(split)
    return train(f"glue_{dataset}_narrow{ARMS[arm]}", out / ending, fields)


def compare(arguments):
    """The rows of pre-training and fine-tuning, written whenever one is done."""
    out, pretraining, rows, rates = Path(arguments.out), [], [], {}
    for seed in arguments.seeds:
        pretraining += pretrain(out, seed, arguments.pretraining)
        update("bert_glue", {"pretraining": pretraining})
        for dataset in arguments.datasets:
            metric = GLUE[dataset].metrics[0]
            for arm in ARMS:
                more = arguments.fine_tuning + (["data.fraction=0.2"] if dataset == "sst2" else [])
                if (dataset, arm) not in rates:
                    rates[dataset, arm] = choose(out, dataset, arm, seed, arguments.rates, more, metric)
                found = fine_tune(out, dataset, arm, seed, rates[dataset, arm], more)
                row = dict(dataset=dataset, network=arm, seed=seed, rate=rates[dataset, arm], epochs=found["epochs"])
                rows.append(row | {"metric": metric, "value": found[metric], "seconds": found["seconds"]})
                update("bert_glue", {"fine_tuning": rows})
    return pretraining, rows


def choose(out, dataset, arm, seed, rates, overrides, metric):
    """The rate with the best metric on a tenth of the training data; the only one without a choice."""
    if len(rates) == 1:
        return rates[0]
    return max(rates, key=lambda rate: fine_tune(out, dataset, arm, seed, rate, overrides, split=0.1)[metric])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--datasets", nargs="+", default=["sst2", "cola", "rte"], choices=sorted(GLUE))
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-4, 1e-3])
    parser.add_argument("--pretraining", nargs="*", default=[])
    parser.add_argument("--fine-tuning", nargs="*", default=[])
    parser.add_argument("--out", default="runs/bert_glue")
    pretraining, rows = compare(parser.parse_args())
    show("pre-training", pretraining)
    groups = {(row["dataset"], row["network"]): [] for row in rows}
    for row in rows:
        groups[row["dataset"], row["network"]].append(row["value"])
    show("fine-tuning", [dict(dataset=d, network=n, value=spread(values)) for (d, n), values in groups.items()])


if __name__ == "__main__":
    main()
