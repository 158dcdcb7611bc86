"""The shared parts of recipes as programs: command line, configuration files, dry run, report."""
