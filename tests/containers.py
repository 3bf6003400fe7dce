"""The same few images written into every container that isomorph reads."""

import io
import tarfile
from collections import Counter

import numpy as np
import webdataset
from PIL import Image

CLASSES = ["ant", "bee", "cat"]
EACH = 5


def picture(label: int, i: int) -> bytes:
    pixels = np.random.default_rng([label, i]).integers(0, 255, (20 + i, 24, 3)).astype(np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


SAMPLES = [(label, i, picture(label, i)) for label in range(len(CLASSES)) for i in range(EACH)]


def add(archive, name, data):
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            add(archive, name, data)


def as_folder(root, split="train"):
    for label, i, data in SAMPLES:
        (root / split / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        (root / split / CLASSES[label] / f"{i}.png").write_bytes(data)


def as_tar(root, prefix=""):
    mixed = [SAMPLES[i] for i in np.random.default_rng(0).permutation(len(SAMPLES))]
    members = [(f"{prefix}{CLASSES[label]}/{i}.png", data) for label, i, data in mixed]
    write_tar(
        root / "train.tar",
        [*members, ("README", b"x"), ("./._hidden.png", b"x"), ("loose.txt", b"")],
    )


def as_class_tars(root):
    for label, name in enumerate(CLASSES):
        write_tar(
            root / f"train/{name}.tar",
            [(f"{i}.png", data) for other, i, data in SAMPLES if other == label],
        )


def as_tar_of_tars(root):
    as_class_tars(root / "parts")
    tars = sorted((root / "parts/train").iterdir())
    write_tar(root / "train.tar", [(path.name, path.read_bytes()) for path in tars])


def as_shards(root, each=4, pattern="train-%04d.tar", kind="cls"):
    """Shards written by the webdataset library."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    with webdataset.ShardWriter(str(root / pattern), maxcount=each, verbose=0) as writer:
        for label, i, data in SAMPLES:
            beside = {"cls": label} if kind == "cls" else {"json": {"label": label, "other": "x"}}
            writer.write({"__key__": f"deep/{label}_{i}", "png": data, **beside})


def as_plain_shards(root):
    for n in range(3):
        few = [s for s in SAMPLES if s[1] % 3 == n]
        members = []
        for label, i, data in few:
            for m in ((f"{label}{i}.cls", b"%d\n" % label), (f"{label}{i}.PNG", data)):
                members.append(m)
        write_tar(root / f"train/{n:03d}.tar", members)
    (root / "classnames.txt").write_text("\n".join(CLASSES))


def dataset(samples=SAMPLES, named=True):
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as Picture

    columns = {
        "image": [{"bytes": d, "path": None} for *_, d in samples],
        "label": [label for label, *_ in samples],
    }
    features = Features(
        {"image": Picture(), "label": ClassLabel(names=CLASSES) if named else Value("int64")}
    )
    return Dataset.from_dict(columns, features=features)


def as_parquet(root, files=1, named=True):
    root.mkdir(parents=True, exist_ok=True)
    for n in range(files):
        dataset(SAMPLES[n::files], named).to_parquet(root / f"train-{n:05d}-of-{files:05d}.parquet")


CONTAINERS = {
    "folder": ("imagefolder", as_folder),
    "tar": ("tar", as_tar),
    "wrapped tar": ("tar", lambda root: as_tar(root, "./train/")),
    "class tars": ("tar", as_class_tars),
    "tar of tars": ("tar", as_tar_of_tars),
    "shards": ("webdataset", as_shards),
    "json shards": ("webdataset", lambda root: as_shards(root, kind="json")),
    "plain shards": ("webdataset", as_plain_shards),
    "parquet": ("huggingface", lambda root: as_parquet(root, 2)),
}


def pixels(source):
    """What the source holds, whatever the order."""
    return Counter(
        (label, source.image(i).tobytes()) for i, label in enumerate(source.labels.tolist())
    )


EXPECTED = Counter(
    (label, Image.open(io.BytesIO(data)).convert("RGB").tobytes()) for label, _, data in SAMPLES
)
