"""LeRobot datasets in, sidecar files out."""
