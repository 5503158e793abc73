"""Operators in C++ for CPUs, compiled at first use with the machine's own compiler."""
