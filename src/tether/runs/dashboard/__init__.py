"""A local web page over a folder of runs (`tether dashboard`), and what `tether show` prints of the same."""
