"""A run's curves in TensorBoard, and in MLflow if the settings ask for it.

curves        from a journal's events to points of curves
trackers      what every tracker must do, and TensorBoard's files
mlflow_runs   MLflow's runs
"""
