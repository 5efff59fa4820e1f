"""Images in tiles over ranks: the user's own model runs on a rank's tile as if it held the whole image.

ownership.py   which pixels a rank owns, what an operation needs, who sends what to whom: pure arithmetic
halo.py        the exchange of borders, forward and backward
place.py       where in the whole image a tensor lies
windows.py     convolutions
pools.py       maxima and means
resize.py      interpolation, adaptive pools, pixel shuffles
norms.py       statistics over all tiles
hand_over.py   from tiles to whole images, shares of the batch or sums, and back
rules.py       what each of torch's functions means on a tile; with names.py, operands.py and shapes.py
overlap.py     inner outputs while halos travel
fuse.py, wide.py   one exchange for several layers
view.py        the mode under which the model runs
tiled.py       a model's forward in it
dry.py         the same forward on shapes: what it says (said.py), and where its result lies
"""
