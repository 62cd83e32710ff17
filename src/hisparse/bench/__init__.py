"""Kernel benchmarks: every figure beside dense attention and the card's own bandwidth, in one run, after a check.

A bench module has one function `run` that yields rows for the results file. A result that is wrong raises
:class:`~hisparse.bench.measure.WrongResult`: then no speed is given.
"""
