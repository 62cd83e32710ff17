"""`python -m hisparse`, the same as the command `hisparse`."""

from hisparse.cli.main import run

if __name__ == "__main__":
    run()
