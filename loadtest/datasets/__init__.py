"""What is sent: one file for each kind of data set."""
