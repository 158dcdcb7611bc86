"""What recipes share as programs: command line, configuration files, dry run, plan and report."""
