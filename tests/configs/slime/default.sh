python train.py \
   --advantage-estimator grpo \
   --eps-clip 0.2
