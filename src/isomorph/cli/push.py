"""The push command."""

from pathlib import Path

from isomorph.checkpoints.paths import NEW_PATHS, check_repository
from isomorph.cli import options as opt
from isomorph.cli.output import show
from isomorph.errors import UserError


@opt.command
def push(
    model: str,
    name: str,
    /,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    replace_card: bool = False,
    out: Path | None = None,
    overwrite: opt.Overwrite = False,
    checkpoint: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    json_: opt.Json = False,
) -> None:
    """Upload a model to the Hugging Face hub, with a model card, for `hf-hub:OWNER/NAME` in every command and in timm.

    Example: isomorph push runs/tcnn me/tcnn --private

    Parameters
    ----------
    model
        The folder of a run, or a checkpoint of isomorph or of another program.
    name
        Its name on the hub, OWNER/NAME.
    private
        Create the repository for its owner only.
    revision
        Branch to upload to; created if there is none. By default main.
    message
        Message of the commit.
    replace_card
        Replace a model card (README.md) that is there already; without it, one is kept as it is.
    out
        Write the files to this folder instead of uploading them.
    """
    check_repository(name)
    _check_out(out, overwrite, {"--private": private, "--revision": revision, "--message": message})
    with opt.loading():
        from isomorph.cli.open_models import find_recipe, open_given
        from isomorph.deployment.hub import push as upload
        from isomorph.deployment.hub import require_token, save_for_hub
    if out is None:
        require_token(None)
    net = open_given(model, checkpoint)
    run = Path(model) if find_recipe(Path(model)) else None
    if out:
        save_for_hub(net, out, name, run=run)
        text, result = f"wrote {out}; upload it with `hf upload {name} {out}`", {"out": str(out)}
    else:
        options = dict(private=private, revision=revision, message=message, replace_card=replace_card)
        url = upload(net, name, run=run, **options)  # type: ignore[arg-type]
        text, result = f"pushed to {url}; load it with iso.load('hf-hub:{name}')", {"url": url}
    show(json_, result, text)


def _check_out(out: Path | None, overwrite: bool, others: dict[str, object]) -> None:
    """Raise UserError for a folder that has files, or with options that are for uploading."""
    if out is None:
        return
    given = [option for option, value in others.items() if value]
    if given:
        raise UserError(f"--out uploads nothing; leave {' and '.join(given)} out")
    if out.exists() and not (out.is_dir() and (overwrite or not any(out.iterdir()))):
        raise UserError(f"--out {out} exists; give --overwrite to replace the files in it, or another folder")
    if not overwrite:
        NEW_PATHS.add(out.absolute())
