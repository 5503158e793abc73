"""Headrace against other servers on this machine: the same workload, in turns, through HTTP.

    python -m tests.benchmarks.peers.install all      what takes part, each in an environment of its own
    python -m tests.benchmarks.peers                  rounds, then the tables

`command.py` reads the options; `rounds.py` starts each server afresh in each round and measures every case of
`case.py` with `headrace bench serve`; `comparison.py` makes medians and ratios of it, `report.py` the tables.
What takes part is described in `headrace.py`, `llama.py`, `openvino.py` and `vllm.py`.
"""
