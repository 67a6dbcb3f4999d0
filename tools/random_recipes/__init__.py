"""Recipes with random options: each is trained, resumed and exported, and the results are compared.

``make random-recipes`` runs it. A recipe of the examples gets random options (kind of model, strategy and number of
ranks, adapters, formats and times of the saves, ...); those that contradict each other are drawn again. What is then
checked for each recipe is in :mod:`tools.random_recipes.check`.
"""
