"""The hosts: frameworks that train models, and what makes each obey the ``"axonn"`` block or flags."""
