"""One module per command of `headrace`. Why they import inside of functions: see `compose/cli.py`."""
