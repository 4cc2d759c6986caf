"""Benchmarks of gnnaccel against PyTorch Geometric, its peers and the hardware.

Run ``python -m benchmarks --help`` from the root of the repository.

Every case is checked before it is timed, every competitor runs in the same process
and in turn with the others, and the time that the bytes alone would take is measured
in the same turns and printed beside the result. What each file does:

* ``graphs``: the graph to run on (R-MAT, an npz file, a folder of data sets)
* ``registry``: what a case is, and the table of all cases
* ``cases_kernels``, ``cases_layers``, ``cases_any_layer``, ``cases_extra``,
  ``cases_loading``, ``cases_models``, ``cases_prefetch``: the cases
* ``gpu_pipeline``: a script of its own, for machines with an accelerator
* ``molecules``: data sets of many small graphs for ``cases_loading``
* ``ours``: what gnnaccel makes of a layer
* ``check``: is the result right?
* ``measure``: time and memory
* ``bounds``: how fast could it be?
* ``targets``: how fast should it be? The project's yardsticks
* ``runner``: check, then measure, one case after the other
* ``report``: JSON, table and bar chart
* ``cli``: the command line
"""
