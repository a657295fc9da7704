python -m tinker_cookbook.recipes.math_rl.train \
    model_name=my-model \
    kl_penalty_coef=0.01
