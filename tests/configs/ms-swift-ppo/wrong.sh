swift rlhf \
    --rlhf_type ppo \
    --model my-model \
    --kl_coef -0.05
