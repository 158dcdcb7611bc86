"""One runnable file per experiment, the only place where everything meets: `python -m vla_rl.recipes.<name> --help`."""
