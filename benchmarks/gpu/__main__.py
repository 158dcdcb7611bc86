"""Checks of the lines that a GPU runs, without one, and the first minutes on one.

    python -m benchmarks.gpu --tiny                         figures that need no GPU
    python -m benchmarks.gpu --out DIR --minutes 9          the campaign, on one CUDA GPU
    python -m benchmarks.gpu --out DIR --minutes 9 --tiny   its stages on the CPU, at a tiny size
    python -m benchmarks.gpu --wheels                       the packages that it needs

The keys of the last line of `--tiny` are explained in `meta_paths`, `syncs` and `estimates`, those of
the campaign in the modules of `campaign`, which goes on with what is missing in DIR.
"""

import argparse
from pathlib import Path

OLDEST_TORCH = (2, 11)


def main() -> None:
    """Do what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small networks, without a GPU")
    parser.add_argument("--out", type=Path, help="folder of the campaign")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the campaign")
    parser.add_argument("--wheels", action="store_true", help="print what the campaign needs")
    options = parser.parse_args()
    if options.wheels:
        # before anything else is imported: it may not be there yet
        from benchmarks.gpu.campaign.wheels import instructions

        print(instructions())
    elif options.out is not None:
        campaign(options.out, options.minutes, is_tiny=options.tiny)
    elif options.tiny:
        tiny_figures()
    else:
        parser.error("expected --out DIR for the campaign on a GPU, --tiny, or --wheels")


def tiny_figures() -> None:
    """Print the figures that need no GPU."""
    from benchmarks.gpu import meta_paths, syncs
    from benchmarks.gpu.estimates import estimate_figures
    from benchmarks.interleaved import print_json_line

    # the memory of the 7B needs no 7B: its shapes are tracked, which takes half a minute
    print_json_line(meta_paths.figures() | syncs.figures() | estimate_figures(is_tiny=False))


def campaign(folder: Path, minutes: float, *, is_tiny: bool) -> None:
    """Run the campaign, and say where its page is."""
    from benchmarks.gpu.campaign.runner import run_campaign
    from vla_rl.errors import ConfigError

    try:
        if not is_tiny:
            require_gpu()
        known = run_campaign(folder, minutes, is_tiny=is_tiny)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{folder / 'campaign.md'}, {folder / 'campaign.json'}")
    failed = [found.stage for found in known if not found.is_whole]
    if failed:
        raise SystemExit(f"not finished: {', '.join(failed)}; the same command tries them again")


def require_gpu() -> None:
    """Raise ConfigError unless torch can compute on a GPU."""
    import torch

    from vla_rl.cli.doctor.machine import Machine, gpus
    from vla_rl.errors import ConfigError

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        expected = ".".join(map(str, OLDEST_TORCH))
        raise ConfigError(f"torch is {torch.__version__}, expected {expected} or newer")
    if not torch.cuda.is_available():
        reasons = "; ".join(f"{each.what}. {each.remedy}" for each in gpus(Machine()))
        raise ConfigError(
            f"the campaign needs a CUDA GPU: {reasons or 'torch sees none'}; --tiny runs its "
            "stages on the CPU"
        )


if __name__ == "__main__":
    main()
