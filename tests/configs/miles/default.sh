python3 train.py \
   --advantage-estimator grpo \
   --eps-clip 0.2
