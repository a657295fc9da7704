python -m tinker_cookbook.recipes.math_rl.train \
    model_name=my-model \
    group_size=8
