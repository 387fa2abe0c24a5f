package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// idempotencyKey is the same for every run of the object, and for no other object.
func idempotencyKey(resource string, object client.Object) string {
	return fmt.Sprintf("%s/%s/%s/%s", resource, object.GetNamespace(), object.GetName(), object.GetUID())
}

// send sends body as JSON and returns the body of a 2xx.
func send(ctx context.Context, via *http.Client, method, url string, header http.Header, body any) ([]byte, error) {
	content, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	for name, values := range header {
		request.Header[name] = values
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := via.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	// Read to its end, so that the connection can be used again.
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode/100 != 2 {
		return nil, fmt.Errorf("%s answered %s", url, response.Status)
	}
	return answer, nil
}
