"""A second fabric of the ``rdma`` backend: tag messages over UCXX. Import-light."""
