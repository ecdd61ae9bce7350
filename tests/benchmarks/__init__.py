"""The benchmark: `make bench`. Not a part of the tests."""
