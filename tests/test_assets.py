"""The page's scripts and styles: short lines and functions, comments, plain words, colours for every eye."""

import re
from pathlib import Path

import numpy as np
import pytest

import isomorph
from isomorph.lab.report.html import SCRIPTS

ASSETS = Path(isomorph.__file__).parent / "lab" / "report" / "assets"
FILES = sorted(ASSETS.iterdir())
JAVASCRIPT = [path for path in FILES if path.suffix == ".js"]
CSS = (ASSETS / "page.css").read_text(encoding="utf-8")
MAX_FUNCTION = 45
UNWANTED = re.compile(  # words that readers of a page do not know, or that mean something else; what to write instead
    r"\b(just born|at birth|birth|born|lets? go|let go of|what the model says|what was (kept|found|said)|dials?|"
    r"pictures?|places?|looks?|beside|refuses?|mends?|as ever|of ours|so many|anew|heeds?|likeness|likenesses|"
    r"is no [a-z]+|knows no|by hand|goes on|takes up|the house)\b",
    re.IGNORECASE,
)  # initialisation; unpin; prediction; saved, result, message; gating parameters; image; position; attends to; next to;
# reject; fix; unchanged; isomorph's; N; again; obey; similarity; is not a, has no; in your own code; resumes; package
FUNCTION = re.compile(  # of a file or a class, to the line with the same indentation that closes it
    r"^(?P<indent>|  )(?!if |for |while |class )(?:(?:async )?function |const |get |async )?(?P<name>\w+)"
    r"(?: = [^;\n{]*=>| ?\([^;]*?\)) ?\{\n(?=(?P<body>.*?)^(?P=indent)\})",
    re.MULTILINE | re.DOTALL,
)


def by_name(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


@by_name([*FILES, *sorted(ASSETS.parent.glob("*.py"))])
def test_words_are_plain_and_lines_clean(path):
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    for number, line in enumerate(text.splitlines(), 1):
        found = UNWANTED.search(line)
        assert not found, f"{path.name}:{number} has {found[0]!r}"
        assert len(line) <= (120 if path.suffix == ".py" else 100), (
            f"{path.name}:{number} has {len(line)} characters"
        )
        assert line == line.rstrip()
        assert "\t" not in line


@by_name(JAVASCRIPT)
def test_functions_are_short_and_have_a_comment(path):
    text = path.read_text(encoding="utf-8")
    assert re.match(r'("use strict";\n)?// ', text), f"{path.name} does not say what is in it"
    found = list(FUNCTION.finditer(text))
    assert len(found) > 1 or path.name == "start.js"
    for match in found:
        before = text[: match.start()].splitlines()[-1]
        assert match["body"].count("\n") < MAX_FUNCTION, f"{path.name}: {match['name']} is long"
        inner = match[0].startswith("  const")  # a function within another one needs no comment
        assert inner or re.match(r" *(/\*\*.*\*/| ?\*/)$", before), (
            f"{path.name}: {match['name']} has no comment"
        )


def test_every_script_is_part_of_the_page_and_a_selector_has_one_block():
    assert set(SCRIPTS) == {path.name for path in JAVASCRIPT}
    text = re.sub(r"/\*.*?\*/", "", CSS, flags=re.DOTALL)
    top = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", text)
    selectors = [selector.strip() for selector in re.findall(r"([^{}]+)\{", top)]
    assert len(set(selectors)) == len(selectors)


# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen without red, green or blue cones.
COLOUR_BLIND = {
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
    "usual": np.eye(3).tolist(),
}
SCHEMES = [dict(re.findall(r"--(\w+): (#\w+);", part)) for part in CSS.split("@media", 2)[:2]]


def linear_rgb(colour):
    values = np.array(list(bytes.fromhex(colour.lstrip("#")))) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ rgb
    )
    t = xyz / (0.9505, 1, 1.089)
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    lightness = 116 * f[1] - 16
    red_or_green = 500 * (f[0] - f[1])
    yellow_or_blue = 200 * (f[1] - f[2])
    return np.array([lightness, red_or_green, yellow_or_blue])


def contrast(a, b):
    """Contrast of two colours by WCAG 2."""
    low, high = sorted(
        float(np.dot((0.2126, 0.7152, 0.0722), linear_rgb(colour))) for colour in (a, b)
    )
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_stay_apart_for_the_colour_blind_and_are_readable(scheme):
    colours = {}
    for name, colour in SCHEMES[scheme].items():
        if len(colour) < 7:
            colour = "#" + "".join(2 * digit for digit in colour[1:])
        colours[name] = colour
    series = [colours[f"s{i}"] for i in range(6)]
    for sight in COLOUR_BLIND.values():
        seen = [lab(np.clip(sight @ linear_rgb(colour), 0, 1)) for colour in series]
        assert min(np.linalg.norm(seen[i] - seen[j]) for i in range(6) for j in range(i)) > 15
    for ground in ("page", "card"):
        assert contrast(colours["ink"], colours[ground]) > 7
        assert contrast(colours["quiet"], colours[ground]) > 4.5
        for colour in series:
            assert contrast(colour, colours[ground]) > 2.8
