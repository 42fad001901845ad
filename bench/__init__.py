"""Speed side by side with peers, on this machine, in one run. `python -m bench --help`."""
