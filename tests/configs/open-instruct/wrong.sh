python open_instruct/grpo_fast.py \
    --beta 0.01 \
    --kl_estimator 0
