"""Starting the processes of a run, here or on a Ray cluster, and starting them again where one was lost."""
