"""The ``"axonn"`` block inside DeepSpeed: `config_hook` sees it, `engine` obeys it."""
