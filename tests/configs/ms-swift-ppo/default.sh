swift rlhf \
    --rlhf_type ppo \
    --model my-model \
    --reward_model my-reward-model
