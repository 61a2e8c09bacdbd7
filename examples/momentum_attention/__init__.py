"""Does momentum help attention? Small models trained from scratch with and without it: docs/momentum_attention.md.

    python -m examples.momentum_attention FOLDER

trains every model that is not in FOLDER yet, measures every one that is not measured yet, and writes FOLDER/tables.md
and FOLDER/curves.png; stopped at any moment and started again, it goes on. `training` has the recipe, `measuring` what
is measured, `tables` how it is shown.
"""
