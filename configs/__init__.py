"""Data only: model and cluster configurations, tokenizers and sample texts.

Nothing is imported from here; files are found through ``importlib.resources``:

    importlib.resources.files("headrace.configs") / "models" / "t1.json"

Folders: ``models`` (model configurations), ``cluster`` (deployments), ``tokenizer``
(``tokenizer-4096.json``, ``tokenizer-1024.json``) and ``texts`` (public-domain prose).
``files()`` returns a plain path both for an editable install and for an installed wheel.
"""
