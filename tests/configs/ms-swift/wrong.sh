# a combination that reaches a tensor which is not there
swift rlhf \
    --rlhf_type grpo \
    --kl_in_reward true \
    --loss_type real \
    --beta 0.04
