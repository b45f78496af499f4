"""Looking into a store and repairing it: what `headrace store` does, with a cluster or without.

`directory` opens the files of a store that nobody serves; `survey` sums up what lies there;
`repair` reads everything back, blanks what is damaged, and cleans up; `shipping` writes and reads
prefix files; `live` asks a running store; `trial` measures one; `cli` is the command line.
"""
