"""Runs pytest on the files named as arguments: the entry of every test target in `BUILD`."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
