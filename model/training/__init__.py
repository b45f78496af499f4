"""How the model in the box was trained: its texts, its forward with gradients, one program.

`corpus` cuts clean prose out of packages; `stories`, `talk`, `recall` and `scenes` make texts and
pictures whose answers are known; `chat` writes them in the released template; `data` mixes and
packs them. `net` (of `pieces`, `attend`, `tower`, `draft`) computes what the serving modules
compute, differentiably and over packed texts; `fake` rounds as storage will. `optim`, `trainer`
and `train` step it, `export` writes the checkpoint. docs/model-card.md says what came out.
Nothing that serves imports this package.
"""
