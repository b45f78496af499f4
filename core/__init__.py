"""core: the words all rooms share.

ids and attempts (`ids`), content addresses (`chain`), which rows must run (`rows`), requests and
model facts (`request`, `card`), messages and frames on the wire (`messages`, `frames`, `link`),
state tables (`states`), limits and errors (`limits`, `errors`), time (`clock`), event loops
(`loops`), fault points (`faults`), the life around a replica's work (`replica`), and what is
recorded of a request (`records`).
No torch, no ray, no redis: importing this room costs milliseconds and touches no device. The only
input and output is `link`, the one place where frames meet a socket (docs/decisions/0002).
Import from the modules: `from headrace.core.rows import plan_decode`.
"""
