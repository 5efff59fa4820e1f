"""Images in tiles over ranks: the user's own model runs on a rank's tile as if it held the whole image.

ownership.py        the pixels that a rank owns, that an operation needs, and that ranks exchange: pure arithmetic
halo.py             the exchange of borders, forward and backward, for one layer or for several
tile_layout.py      which part of the whole image a tensor holds
windows.py          convolutions
pools.py            max and average pools
resize.py           interpolation, adaptive pools, pixel shuffles
norms.py            statistics over all tiles
hand_over.py        from tiles to whole images, shares of the batch or sums, and back
rules.py            a rule for each of torch's functions; with arguments.py, operands.py and shapes.py
overlap.py          inner outputs are computed while halos travel
fuse.py             one exchange for several layers
view.py             the mode under which the model runs
tiled_model.py      a model's forward under it
dry_run.py          the same forward on fake tensors: its collectives and its result's layout, stored with the model
"""
