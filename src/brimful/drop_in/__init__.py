"""The interface, in the forms that other libraries have: an estimator of scikit-learn, a pipeline of transformers."""
